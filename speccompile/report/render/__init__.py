"""A report as an HTML file, and as text for a terminal."""
