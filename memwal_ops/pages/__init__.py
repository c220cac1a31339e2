"""HTML pages about tables: templates, charts, and their rendering; the service and ``memwal-ops report`` share them."""
