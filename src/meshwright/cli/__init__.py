"""The command line. In: words. Out: text for a person, or JSON for a script."""
