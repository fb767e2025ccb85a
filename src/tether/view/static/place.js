// Where the reader is: #/run/NAME/iteration/5/row/3?colour=kl&beta=0.1. What a view lets one
// choose goes behind the question mark, so that an address shows again what was seen.

export function currentPlace() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decoded), choices: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // no escape of ours; it will be found nowhere
  }
}

// Notes a choice in the address without going anywhere; a list is noted one by one.
export function noteChoice(name, value) {
  const { choices } = currentPlace();
  choices.delete(name);
  for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") choices.append(name, one);
  const path = location.hash.split("?")[0] || "#/";
  const query = choices.toString();
  history.replaceState(null, "", query ? `${path}?${query}` : path);
}
