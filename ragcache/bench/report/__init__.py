"""`ragcache bench report`: what paging and sharing gain, measured, as a page with plots."""
