"""Helpers of the tests: models, engines, references and cases that several test files share."""
