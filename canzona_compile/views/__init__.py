"""What a step sees in place of a parameter: a whole DTensor, a piece, a slice, some entries of a stack."""
