"""Everything that touches Spark's private parts."""
