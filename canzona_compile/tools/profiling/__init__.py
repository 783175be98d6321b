"""Measures real steps of a user's model on gloo ranks: phases, a trace, and the rates of the machine."""
