"""Weights that draft tokens for a target model: EAGLE-3, Medusa, MLP speculators, MTP layers."""

from __future__ import annotations

from tgi_cli.models.speculators.base import Drafts, Proposer, TargetStates, TargetStep

__all__ = ["Drafts", "Proposer", "TargetStates", "TargetStep"]
