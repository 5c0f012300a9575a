"""Reports: runs, their status, a classifier's test; tables and pages in grid.py and page.py."""
