"""Executing rank programs: process groups, agreement among ranks, memory, collectives."""
