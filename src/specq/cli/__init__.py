"""The command line: one file a verb, put together by `app`; the layers below never import it."""
