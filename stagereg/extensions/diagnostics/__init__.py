"""Diagnostics: checks for probable mistakes in the state that a program saves."""
