"""How large the KV cache can be, and how long steps take: measured at warm-up."""
