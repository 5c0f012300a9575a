"""What leaves this process (secrets are masked),
and what comes from elsewhere (names and sizes are checked).
"""
