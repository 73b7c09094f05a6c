"""A rehearsal in pictures. In: a result. Out: pieces of HTML that need nothing from outside."""
