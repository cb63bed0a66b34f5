"""An inspection report: what a model became, what each step costs, and what its drafts are worth."""
