// Language and theme, remembered where the browser allows it.

import { speak, spoken } from "./words.js";

export function remembered(key) {
  try {
    return localStorage.getItem(`tether.${key}`);
  } catch {
    return null; // storage is off: the choice lasts as long as the page
  }
}

export function remember(key, value) {
  try {
    localStorage.setItem(`tether.${key}`, value);
  } catch {
    // as above
  }
}

export function startPreferences() {
  setLanguage(remembered("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
  const theme = remembered("theme");
  if (theme) document.documentElement.dataset.theme = theme;
}

function setLanguage(code) {
  speak(code);
  document.documentElement.lang = spoken() === "zh" ? "zh-Hans" : "en";
}

export function switchLanguage() {
  setLanguage(spoken() === "zh" ? "en" : "zh");
  remember("language", spoken());
}

export function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  remember("theme", theme);
}
