"""Joins: training continues with correct results when ranks run out of data at different steps.

``joinable`` declares the joinables, with torch's names; ``context`` defines ``Join``; each file of ``kinds`` defines
one joinable and its hook.
"""
