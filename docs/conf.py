"""How the documentation is built: ``make docs``, or ``sphinx-build -W docs build/docs``."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

project = "speccompile"
copyright = "The authors of speccompile, Apache-2.0"
extensions = [
    "error_list",
    "pass_list",
    "repository_links",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
templates_path: list[str] = []
exclude_patterns = ["_ext"]

myst_enable_extensions = ["colon_fence", "deflist"]
# GitHub makes the same anchors of headings, so a link works on both.
myst_heading_anchors = 4

# A type is shown as it is written: the objects that it names are not all public.
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "speccompile"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
# Prompts and continuation lines of shells are not copied.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
