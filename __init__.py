"""draftsmith: train the small heads that let a language model emit several tokens per pass, and
prove them.

One way leads through the package: conversations -> token rows -> hidden-state cache -> head ->
acceptance report -> export; each arrow is one command (`draftsmith --help`), each artifact a
documented format.
"""

__version__ = "0.1.0"
