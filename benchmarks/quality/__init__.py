"""Quality measurements: prompts with known answers, scorers, intervals, and the files that results are kept in."""
