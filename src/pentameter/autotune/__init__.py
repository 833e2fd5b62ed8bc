"""Which of many is best: the layout for a configuration, the values of a sweep."""
