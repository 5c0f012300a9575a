"""Figures: programs that measure trainkit against loops by hand and other trainers.
See README.md here.
"""
