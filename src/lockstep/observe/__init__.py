"""Counters, timelines and reports: what the machinery did, in numbers a person can look at."""
