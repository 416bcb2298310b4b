"""Models that run on jaxcoll, and the `jaxcoll` command; nothing below imports from here."""
