"""The compiler turns options into a plan, the plan into pipelines of passes, and their results into executables."""
