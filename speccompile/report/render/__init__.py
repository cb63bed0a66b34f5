"""Renderers of a report: an HTML file, and text for a terminal."""
