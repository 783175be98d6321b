"""Planning without ranks: shapes and a mesh in; the plan that a run would make, its figures and reports out."""
