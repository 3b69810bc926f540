"""Kinds of joinables, one per file: the joinable, and its hook for ranks without data."""
