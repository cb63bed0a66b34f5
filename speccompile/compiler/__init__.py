"""The compiler: what was asked for becomes a plan, the plan pipelines of passes, and these executables."""
