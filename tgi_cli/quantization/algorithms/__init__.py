"""Makes quantized weights: grids, GPTQ, AWQ, rounding; lays them out as their formats do."""
