"""The routes of the dashboard, one noun a file."""
