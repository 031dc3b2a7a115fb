"""The processes of ``tgi serve``: start, watch, drain, stop; exit codes."""
