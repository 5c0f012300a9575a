"""The page of a test of a classifier:
counts and worst samples (results), derived figures (facts), charts (page).
"""
