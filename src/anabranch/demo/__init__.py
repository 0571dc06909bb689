"""The demonstration job: a stream of edits, filtered, worked on, counted per server, and timed at the sink."""
