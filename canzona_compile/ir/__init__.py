"""What passes rewrite: the step and its layouts, programs, text form, promises, and the pipeline that keeps them."""
