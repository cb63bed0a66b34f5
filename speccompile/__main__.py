"""``python -m speccompile``: the command line."""

from speccompile.cli import app

if __name__ == "__main__":
    app(prog_name="speccompile")
