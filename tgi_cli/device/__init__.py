"""Facts of the devices: memory, threads, what they compute well."""
