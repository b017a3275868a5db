"""Programs for those who work on Fairlead: the site, the generated pages, releases. Nothing of it is shipped."""
