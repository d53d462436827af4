"""Find, compare and grade final answers of math problems, in processes that can be killed."""
