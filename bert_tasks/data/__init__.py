"""Reading, checking, splitting and caching of labelled text; knows columns, not models or recipes."""
