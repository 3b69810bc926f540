"""Diagnostics: looks for probable mistakes in what a program saves."""
