"""Reports: plan of a run, timeline, resume check, scaling; tables and pages in grid.py and page.py."""
