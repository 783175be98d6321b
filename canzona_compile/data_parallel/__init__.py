"""ZeRO-1: gradients are reduced to the owners of matrices, and updated parameters are gathered from them."""
