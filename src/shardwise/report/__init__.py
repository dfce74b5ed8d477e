"""Tables and pages from the nouns."""
