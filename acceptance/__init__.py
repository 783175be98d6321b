"""The first hour on new hardware: what may be wrong is provoked, step by step, and every result is kept."""
