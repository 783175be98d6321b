"""Measures real steps of a user's model on gloo ranks: phases and a trace."""
