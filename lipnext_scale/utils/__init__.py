"""Used by everything; uses nothing above."""
