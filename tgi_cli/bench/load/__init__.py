"""The load generator: a process that sends requests at their times and timestamps the responses.

``python -m tgi_cli.bench.load`` reads a job and its requests from stdin and writes events to stdout
(``frames``); ``bench/step_driver.py`` starts it. Its interpreter runs nothing that could delay it:
no tokenizer, no dashboard, no statistics.
"""
