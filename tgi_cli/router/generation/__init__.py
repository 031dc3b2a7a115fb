"""From a validated request to text: prompts, generations and their deltas."""
