"""Plays a scheduled step on all of its ranks: discrete events over streams, links and shared processors."""
