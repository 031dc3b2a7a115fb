"""Makes quantized weights: the grids, GPTQ, AWQ, rounding; and lays them out as their formats do."""
