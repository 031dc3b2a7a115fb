"""``tgi chat``: a client of OpenAI's chat completions for terminals and pipes."""
