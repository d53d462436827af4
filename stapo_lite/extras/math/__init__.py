"""Final answers of math problems: found, compared and graded in processes that may be killed."""
