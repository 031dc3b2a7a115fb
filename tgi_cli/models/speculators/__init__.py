"""Weights that draft tokens for a target model: EAGLE-3, Medusa, MLP speculators, MTP layers.

:mod:`.detect` recognizes checkpoints without torch, :mod:`.load` makes a proposer of one.
"""
